"""Load for any OpenAI-compatible server: requests at planned times, and what their tokens' times say."""
