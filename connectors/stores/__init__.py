"""Object stores behind one small surface (``base.ObjectStore``): one file for each library, which is imported nowhere
else. What all of them need — names, sizes, clean-up, checks — is in ``connectors.object_store``."""
