"""placeholder"""
def add_parser(s): pass
