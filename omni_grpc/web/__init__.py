"""The HTTP port: Connect, gRPC-Web, JSON and files, beside gRPC and behind the same gate. No rule, no state."""
