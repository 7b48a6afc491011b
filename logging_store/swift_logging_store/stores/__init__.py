"""Where files may lie: a shared directory, S3, HDFS."""
