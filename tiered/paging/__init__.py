"""Features that the device has no room for: layers live in the host tier, and pass through workspaces in pages."""
