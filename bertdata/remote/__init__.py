"""Read and write files in object stores, on web servers and on the Hugging Face hub.

obstore serves s3://, gs:// and az://, huggingface_hub hf://, and urllib http:// and https://, because obstore does not
support signed URLs, which have a query. These libraries find the credentials. Credentials are never stored or printed:
messages contain the status of a response, and URLs without login and query.
"""
