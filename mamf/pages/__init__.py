"""Make web pages: reports of logs (``mamf report``) and the site of results/ (``mamf results site``)."""
