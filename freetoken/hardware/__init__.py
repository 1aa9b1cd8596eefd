"""What this machine has and how fast it moves bytes. No opinion on what to run."""
