{{/*
The documents of one of the manifests beside this folder, which are for kubectl: with this release's names, namespace
and accounts, and with its labels.

Takes a dictionary: `root`, the context; `file`; `without`, the names of documents to leave out; `namespace`, for a
binding that has none of its own: `*` makes it one for the whole cluster; `exempt`, further accounts (NAMESPACE:NAME)
that the policies let through.
*/}}
{{- define "rouse.manifest" -}}
{{- $root := .root }}
{{- $name := include "rouse.name" $root }}
{{- $gateway := include "rouse.gateway.account" $root }}
{{- $accounts := dict "rouse-gateway" $gateway "rouse-node" (include "rouse.node.account" $root) }}
{{- $text := required (printf "the chart has no file %s" .file) ($root.Files.Get .file) }}
{{- range $written, $account := $accounts }}
{{- $before := printf "'system:serviceaccount:rouse:%s'" $written }}
{{- $user := printf "'system:serviceaccount:%s:%s'" $root.Release.Namespace $account }}
{{- $users := list $user }}
{{- range $.exempt }}
{{- $users = append $users (printf "'system:serviceaccount:%s'" .) }}
{{- end }}
{{- $text = $text | replace (printf "[%s]" $before) (printf "[%s]" (join ", " $users)) | replace $before $user }}
{{- end }}
{{- range $document := splitList "\n---\n" $text }}
{{- $object := fromYaml $document }}
{{- if hasKey $object "Error" }}
{{- fail (printf "%s: %s" $.file $object.Error) }}
{{- end }}
{{- $metadata := $object.metadata }}
{{- $left := has $metadata.name ($.without | default list) }}
{{- $account := get $accounts $metadata.name }}
{{- if eq $object.kind "ServiceAccount" }}
{{- $part := ternary $root.Values.gateway $root.Values.slots.agent (eq $metadata.name "rouse-gateway") }}
{{- $values := $part.serviceAccount }}
{{- $left = or $left (not $values.create) }}
{{- $_ := set $metadata "name" $account }}
{{- with $values.annotations }}
{{- $_ := set $metadata "annotations" . }}
{{- end }}
{{- else if eq $object.kind "Secret" }}
{{- /* Gateways know it by this name. Engines that run on after an uninstallation obey tokens of this key only. */}}
{{- $_ := set $metadata "annotations" (dict "helm.sh/resource-policy" "keep") }}
{{- else }}
{{- $_ := set $metadata "name" (printf "%s%s" $name (trimPrefix "rouse" $metadata.name)) }}
{{- end }}
{{- if $metadata.namespace }}
{{- $_ := set $metadata "namespace" $root.Release.Namespace }}
{{- else if eq $object.kind "RoleBinding" }}
{{- if eq $.namespace "*" }}
{{- $_ := set $object "kind" "ClusterRoleBinding" }}
{{- else }}
{{- $_ := set $metadata "namespace" $.namespace }}
{{- end }}
{{- end }}
{{- with $object.roleRef }}
{{- $_ := set . "name" (printf "%s%s" $name (trimPrefix "rouse" .name)) }}
{{- end }}
{{- range $object.subjects }}
{{- $_ := set . "name" (get $accounts .name) }}
{{- $_ := set . "namespace" $root.Release.Namespace }}
{{- end }}
{{- if and $object.spec $object.spec.policyName }}
{{- $_ := set $object.spec "policyName" (printf "%s%s" $name (trimPrefix "rouse" $object.spec.policyName)) }}
{{- end }}
{{- $_ := set $metadata "labels" (include "rouse.labels" $root | fromYaml) }}
{{- if not $left }}
---
{{ toYaml $object }}
{{- end }}
{{- end }}
{{- end }}
