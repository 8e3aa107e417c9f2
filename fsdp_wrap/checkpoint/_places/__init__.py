"""Where steps lie: in a folder of a file system, or below a URL in an object store.

Files are imported one by one: `remote` lies below the manifest, the others above it.
"""
