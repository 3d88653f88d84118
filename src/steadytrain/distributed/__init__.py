"""How the work of one update is spread over ranks: who they are, how they meet, and what they exchange."""
