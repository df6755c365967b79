"""Resolution: completes a request or a server's settings, or refuses them, before any work is done."""
