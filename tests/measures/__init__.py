"""What the repository weighs: lines by folder, before and after."""
