"""Measurements of a point, in its process: answers, speeds, bytes, codecs. Studies give the settings."""
