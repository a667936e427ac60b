"""A double of what openyuanrong-transfer-engine 0.1 and openyuanrong-datasystem 0.8 install."""
