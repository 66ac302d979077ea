"""Workers in processes of their own, to be killed, frozen and told to end."""
