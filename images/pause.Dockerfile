# What holds a Pod's network in the test cluster's node: nothing is pulled there, not even this.
FROM scratch
COPY rootfs/ /
USER 65532:65532
ENTRYPOINT ["/rouse-pause"]
