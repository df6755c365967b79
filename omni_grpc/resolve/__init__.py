"""Resolution: what a request or a server's settings become, or why they are refused, before any work is done."""
