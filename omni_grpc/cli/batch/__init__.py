"""`omni-grpc batch`: a file of requests, one a line, made by a server; run again, it goes on where it stopped."""
