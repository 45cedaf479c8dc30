"""The processes of one host: started, watched, and how they end."""
