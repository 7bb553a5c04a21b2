"""What measures a point, in its process: answers, speeds, bytes, codecs. Studies say with which settings."""
