"""What to do after a failure, and doing it.

Importing the package imports neither torch nor any module of it: the cores that decide must load without torch.
"""
