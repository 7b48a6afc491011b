"""What an agent tells about its job and its node to who asks over HTTP. See README.md."""
