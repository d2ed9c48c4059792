# The gateway. `images/build` makes the context: a folder `rootfs` with the program and the libraries it needs, nothing
# else (no shell, no package manager).
FROM scratch
COPY rootfs/ /
# State, where nothing else is mounted; the rest of the file system may be read-only.
VOLUME /var/lib/rouse
ENV XDG_STATE_HOME=/var/lib \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["/rouse-gateway"]
