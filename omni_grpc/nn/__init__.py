"""What a transformer is made of: packed rows, the seams that features edit, and the blocks that families share."""
