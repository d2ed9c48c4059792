{{/* The namespaces whose models are served: a list, of which the only entry may be `*`. */}}
{{- define "rouse.namespaces" -}}
{{- .Values.models.namespaces | default (list .Release.Namespace) | toJson -}}
{{- end }}

{{/* One key of a client, as the gateway's file has it. Takes its place in the list, and the values. */}}
{{- define "rouse.config.key" -}}
{{- $key := omit (index . 1) "secret" }}
{{- if (index . 1).secret }}
{{- $_ := set $key "sha256" (printf "${env:ROUSE_KEY_%d}" (int (index . 0))) }}
{{- end }}
{{- toJson $key }}
{{- end }}

{{/* The gateway's file: what follows from the values, and `config` over it. */}}
{{- define "rouse.config" -}}
{{- $kubernetes := dict
  "namespaces" (include "rouse.namespaces" . | fromJsonArray)
  "stubImage" (include "rouse.image" (list . .Values.stub.image))
  "name" "${env:POD_NAME}"
  "podUid" "${env:POD_UID}"
  "saturation" (dict "enabled" .Values.saturation.enabled)
  "warmup" (dict "enabled" .Values.warmup.enabled)
}}
{{- with .Values.stub.image.pullPolicy }}
{{- $_ := set $kubernetes "stubPullPolicy" . }}
{{- end }}
{{- if .Values.slots.enabled }}
{{- $_ := set $kubernetes "slots" dict }}
{{- end }}
{{- if .Values.dualPods.enabled }}
{{- $_ := set $kubernetes "dualPods" (dict "mode" .Values.dualPods.mode) }}
{{- end }}
{{- $listen := dict "api" "0.0.0.0:8080" }}
{{- if .Values.proxies.networks }}
{{- $_ := set $listen "proxies" .Values.proxies }}
{{- end }}
{{- $config := dict "platform" "kubernetes" "kubernetes" $kubernetes "listen" $listen "keys" "none" }}
{{- if include "rouse.admin.exposed" . }}
{{- $_ := set $listen "admin" "0.0.0.0:8180" }}
{{- $admin := dict "token" "${env:ROUSE_ADMIN_TOKEN}" "metrics" .Values.admin.metrics "tls" .Values.admin.tls }}
{{- $_ := set $config "admin" $admin }}
{{- end }}
{{- if .Values.tls.secretName }}
{{- $tls := dict "cert" "/etc/rouse/tls/tls.crt" "key" "/etc/rouse/tls/tls.key" }}
{{- if .Values.tls.clientCa.secretName }}
{{- $_ := set $tls "clientCa" (printf "/etc/rouse/client-ca/%s" .Values.tls.clientCa.key) }}
{{- end }}
{{- $_ := set $config "tls" $tls }}
{{- end }}
{{- if .Values.keys }}
{{- $keys := list }}
{{- range $place, $key := .Values.keys }}
{{- $keys = append $keys (include "rouse.config.key" (list $place $key) | fromJson) }}
{{- end }}
{{- $_ := set $config "keys" $keys }}
{{- end }}
{{- toYaml (mustMergeOverwrite $config (deepCopy .Values.config)) }}
{{- end }}

{{/*
A hash of the keys of the file that a gateway reads at its start only. A change of them replaces the gateways; they read
all others from the file when it changes.
*/}}
{{- define "rouse.config.hash" -}}
{{- $config := include "rouse.config" . | fromYaml }}
{{- $fixed := pick $config "listen" "headroom" "state" "logs" "telemetry" "platform" "kubernetes" }}
{{- $_ := set $fixed "listen" (omit $config.listen "proxies") }}
{{- $admin := $config.admin | default dict }}
{{- $api := $config.api | default dict }}
{{- list $fixed $admin.tls $api.threads (hasKey $config "tls") | toJson | sha256sum }}
{{- end }}
