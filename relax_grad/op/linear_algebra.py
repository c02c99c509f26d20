"""The backward operators of linear algebra."""
