"""What comes with forq: an adapter that makes the bundled model fork, and the prompts it was trained on."""
