"""Files of this program and files it does not trust.

folders.py     where and how this program keeps its own files     json_file.py   read JSON that others wrote
"""
