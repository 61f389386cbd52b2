"""What travels in attention between members: one file each, called by all members of a group at once."""
