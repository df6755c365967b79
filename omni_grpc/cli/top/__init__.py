"""`omni-grpc top`: what a server does, live."""
