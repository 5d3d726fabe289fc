"""k-means, offline and online.

====================  ===================================================================================
``k_means``           ``k_means``: Lloyd's rounds, a bounded iteration
``estimator``         ``KMeans``: the same as an object
``options``           what both can be told
``online_k_means``    ``online_k_means``: centroids that follow a stream
``online_centroids``  ``OnlineKMeans``: what that learns with
``first_centroids``   centroids to begin with
``clusters``          the arithmetic
====================  ===================================================================================
"""
