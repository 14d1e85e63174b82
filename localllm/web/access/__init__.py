"""Access: keys and their scopes, sign-in, origins, proxies, limits, TLS, and what a connection may send."""
