"""APIs other than completions and chats. Each is a translation onto chats, imported with its first request."""
