{{/* The release's name, as every name begins: `rouse` for `helm install rouse`. */}}
{{- define "rouse.name" -}}
{{- if .Values.nameOverride -}}
{{ .Values.nameOverride }}
{{- else if contains "rouse" .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-rouse" .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* The account of the gateways, and that of the node agents. */}}
{{- define "rouse.gateway.account" -}}
{{ .Values.gateway.serviceAccount.name | default (printf "%s-gateway" (include "rouse.name" .)) }}
{{- end }}
{{- define "rouse.node.account" -}}
{{ .Values.slots.agent.serviceAccount.name | default (printf "%s-node" (include "rouse.name" .)) }}
{{- end }}

{{/* By these labels Services and policies find Pods. Takes the context and a part: gateway or node. */}}
{{- define "rouse.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ printf "rouse-%s" (index . 1) }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- end }}

{{/* The labels of every object. */}}
{{- define "rouse.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/part-of: rouse
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* An image's whole name. Takes the context and the image's values. */}}
{{- define "rouse.image" -}}
{{- $root := index . 0 }}
{{- $image := index . 1 }}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository ($image.tag | default $root.Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{/* `true` where the admin listener has an address that others reach, which takes a token. */}}
{{- define "rouse.admin.exposed" -}}
{{- if .Values.admin.tokenSecret.name }}true{{ end -}}
{{- end }}

{{/* `true` where a change of the number of gateways is left to an autoscaler, or more than one is wanted. */}}
{{- define "rouse.gateway.many" -}}
{{- if or .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.replicas) 1) }}true{{ end -}}
{{- end }}
