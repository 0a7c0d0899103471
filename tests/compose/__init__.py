"""docker-compose.yml on a real engine, with parts killed under load: `make compose-test`."""
