"""What comes together.

=====================  ==================================================================================
``apriori``            ``apriori``: frequent item sets, a bounded iteration of two steps
``counting``           the one that holds transactions and counts
``candidates``         the one that chooses what is frequent, and what to count next
``transactions``       transactions and ``ItemSet``
``association_rules``  ``association_rules``: what follows from what
=====================  ==================================================================================
"""
