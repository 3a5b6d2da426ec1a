import implementations  # noqa: F401  before anything else imports Triton
