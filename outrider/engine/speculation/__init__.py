"""What draft and target share of speculation: how likely a guess is, what a row costs, how nodes of a tree travel."""
