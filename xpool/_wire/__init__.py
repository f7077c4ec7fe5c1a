"""How bytes pass between processes: pipes, their messages, and the page that two share."""
