"""One update spread over ranks: who they are, how they meet, and what they exchange."""
