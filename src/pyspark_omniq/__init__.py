"""What lets Spark find the format `omniq` by itself: it imports every top-level module whose name begins with `pyspark_`.

An error while this is imported would break all Python data sources of the environment, so nothing else belongs here.
"""
