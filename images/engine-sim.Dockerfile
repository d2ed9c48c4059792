# The simulated engine, for the test cluster's node.
FROM scratch
COPY rootfs/ /
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["/engine-sim"]
