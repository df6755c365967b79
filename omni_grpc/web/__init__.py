"""The HTTP port: Connect, gRPC-Web, JSON, files and OpenAI's endpoints, beside gRPC and behind the same gate. No rule
of its own."""
