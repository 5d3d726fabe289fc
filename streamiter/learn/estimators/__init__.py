"""What all ``fit`` methods have in common.

============  ===========================================================================================
``sources``   arrays, or what is in a topic now
``running``   ``run_offline``: the run of a flow that learns, which Ctrl-C ends with what it has learned
``progress``  its rounds on stderr
============  ===========================================================================================
"""
