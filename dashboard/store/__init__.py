"""Where requests and incidents are kept."""
