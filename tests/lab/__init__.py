"""What do the pages of the lab answer, and do others say the same?"""
