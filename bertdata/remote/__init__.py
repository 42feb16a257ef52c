"""Files in object stores, on web servers and on the Hugging Face hub: reading and writing them.

obstore does the work for s3://, gs:// and az://, huggingface_hub for hf://, and urllib for http:// and https://: signed
URLs have a query, which obstore does not take. Credentials come from where these libraries look for them. They are
never stored, and no message has them: of an answer it says the status, and of a URL all but login and query.
"""
