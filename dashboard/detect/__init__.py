"""From finished requests to incidents."""
