"""Which devices, how many, in which formats and with which limits serve this load as promised?"""
