"""Transfer engines behind one small surface (``base.TransferEngine``): one file for each library, which is imported
nowhere else. What all of them need — pools, bounds, deadlines, quarantine, trailers — is in ``connectors.one_sided``
and may not be repeated here."""
