"""The denoising loop over a canvas: a policy's forwards, sampling and commit rules."""
