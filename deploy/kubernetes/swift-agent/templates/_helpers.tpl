{{- define "swift.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "swift.labels" -}}
app.kubernetes.io/name: swift-agent
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "swift.nodeLabels" -}}
{{ include "swift.labels" . }}
app.kubernetes.io/component: node
{{- end }}

{{- define "swift.etcdLabels" -}}
{{ include "swift.labels" . }}
app.kubernetes.io/component: etcd
{{- end }}

{{- define "swift.isRuntime" -}}
{{- if has .Values.kind (list "TrainingRuntime" "ClusterTrainingRuntime") -}}true{{- end -}}
{{- end }}

{{- define "swift.numPods" -}}
{{- add .Values.nodes .Values.spares -}}
{{- end }}

{{- define "swift.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "swift.name" .) -}}
{{- end }}

{{- define "swift.jobSecret" -}}
{{- .Values.jobSecret.existingSecret | default (printf "%s-job-secret" (include "swift.name" .)) -}}
{{- end }}

{{- define "swift.etcdName" -}}
{{- printf "%s-etcd" (include "swift.name" .) -}}
{{- end }}

{{- define "swift.etcdServerSecret" -}}
{{- if and (eq .Values.etcd.tls.source "existing") .Values.etcd.tls.serverSecret -}}
{{- .Values.etcd.tls.serverSecret -}}
{{- else -}}
{{- include "swift.etcdName" . }}-server
{{- end -}}
{{- end }}

{{- /* "" for an existing etcd without TLS. */ -}}
{{- define "swift.etcdClientSecret" -}}
{{- if .Values.etcd.tls.clientSecret -}}
{{- .Values.etcd.tls.clientSecret -}}
{{- else if .Values.etcd.enabled -}}
{{- include "swift.etcdName" . }}-client
{{- end -}}
{{- end }}

{{- define "swift.hasEtcdCertificate" -}}
{{- if or .Values.etcd.enabled .Values.etcd.clientCertificate -}}true{{- end -}}
{{- end }}

{{- define "swift.etcdDomain" -}}
{{- include "swift.etcdName" . -}}.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "swift.etcdEndpoints" -}}
{{- $found := .Values.etcd.endpoints -}}
{{- if .Values.etcd.enabled -}}
{{- $found = list -}}
{{- range $number := until (int .Values.etcd.members) -}}
{{- $found = append $found (printf "https://%s-%d.%s:2379" (include "swift.etcdName" $) $number (include "swift.etcdDomain" $)) -}}
{{- end -}}
{{- end -}}
{{- join "," $found -}}
{{- end }}

{{- /* Of servers. No wildcards: etcd looks the names up to see whether a peer may call itself by them. */ -}}
{{- define "swift.etcdDnsNames" -}}
{{- $found := list "localhost" -}}
{{- range $number := until (int .Values.etcd.members) -}}
{{- $found = append $found (printf "%s-%d.%s" (include "swift.etcdName" $) $number (include "swift.etcdDomain" $)) -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{- /* (list HOW LABELS): pods with these labels on different machines. */ -}}
{{- define "swift.apart" -}}
{{- $how := index . 0 -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (fromYaml (index . 1))) -}}
{{- if eq $how "required" -}}
podAntiAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - {{ toYaml $term | nindent 6 | trim }}
{{- else if eq $how "preferred" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        {{- toYaml $term | nindent 8 }}
{{- end -}}
{{- end }}

{{- /* What the schema cannot say; all of it at once. */ -}}
{{- define "swift.check" -}}
{{- $wrong := list -}}
{{- $v := .Values -}}
{{- if and (not $v.image) (not (include "swift.isRuntime" .)) -}}
{{- $wrong = append $wrong "image: name one that has swift-agent and the script" -}}
{{- end -}}
{{- if and (not $v.script) (not (include "swift.isRuntime" .)) -}}
{{- $wrong = append $wrong "script: name the script and its arguments, as a list" -}}
{{- end -}}
{{- if lt (int $v.terminationGracePeriodSeconds) (add 10 $v.preemptGraceSeconds) -}}
{{- $wrong = append $wrong "preemptGraceSeconds: must be 10 or more below terminationGracePeriodSeconds" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "swift.name" .)) -}}
{{- $wrong = append $wrong (printf "release %s: its name must begin with a letter, and have none but a-z, 0-9 and -" .Release.Name) -}}
{{- end -}}
{{- if and (include "swift.isRuntime" .) $v.minNodes -}}
{{- $wrong = append $wrong "minNodes: a TrainJob says how many nodes it has (numNodes); leave it at 0" -}}
{{- end -}}
{{- if and (include "swift.isRuntime" .) (ne (toString $v.nprocPerNode) "auto") -}}
{{- $wrong = append $wrong "nprocPerNode: a TrainJob says it (numProcPerNode); leave it at auto" -}}
{{- end -}}
{{- /* Of pods in namespaces or networks of others there is no policy. */ -}}
{{- $isCutOff := and $v.networkPolicy.enabled (not $v.networkPolicy.metricsFrom) (not $v.hostNetwork) (ne $v.kind "ClusterTrainingRuntime") -}}
{{- if and $v.metrics.podMonitor.enabled $isCutOff -}}
{{- $wrong = append $wrong "networkPolicy.metricsFrom: name the pods of Prometheus, else metrics.podMonitor reaches no pod" -}}
{{- end -}}
{{- range $name, $labels := dict "podLabels" $v.podLabels "job.labels" $v.job.labels -}}
{{- range list "name" "instance" "component" -}}
{{- if hasKey $labels (printf "app.kubernetes.io/%s" .) -}}
{{- $wrong = append $wrong (printf "%s: app.kubernetes.io/%s is the chart's own" $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (int $v.minNodes) (int $v.nodes) -}}
{{- $wrong = append $wrong "minNodes: must not be more than nodes" -}}
{{- end -}}
{{- if and $v.job.successPolicy (not $v.job.indexed) -}}
{{- $wrong = append $wrong "job.successPolicy: needs job.indexed" -}}
{{- end -}}
{{- if $v.etcd.enabled -}}
{{- if not $v.etcd.image -}}
{{- $wrong = append $wrong "etcd.image: name one that has etcd 3.5.6 or newer, or set etcd.enabled to false" -}}
{{- end -}}
{{- if $v.etcd.endpoints -}}
{{- $wrong = append $wrong "etcd.endpoints: are of an existing etcd; set etcd.enabled to false" -}}
{{- end -}}
{{- if and (eq $v.etcd.tls.source "existing") (not (and $v.etcd.tls.serverSecret $v.etcd.tls.clientSecret)) -}}
{{- $wrong = append $wrong "etcd.tls: source existing needs serverSecret and clientSecret" -}}
{{- end -}}
{{- if and (ne $v.etcd.tls.source "existing") (or $v.etcd.tls.serverSecret $v.etcd.tls.clientSecret) -}}
{{- $wrong = append $wrong (printf "etcd.tls: serverSecret and clientSecret are of source existing, not of %s" $v.etcd.tls.source) -}}
{{- end -}}
{{- else if not $v.etcd.endpoints -}}
{{- $wrong = append $wrong "etcd.endpoints: name an existing etcd, or set etcd.enabled to true" -}}
{{- end -}}
{{- if ne (empty $v.etcd.user) (empty $v.etcd.passwordSecret) -}}
{{- $wrong = append $wrong "etcd.user, etcd.passwordSecret: a login needs both" -}}
{{- end -}}
{{- range $v.env -}}
{{- if has .name (list "SWIFT_JOB_SECRET" "SWIFT_ETCD_PASSWORD") -}}
{{- $wrong = append $wrong (printf "env: %s is a secret; mount it (jobSecret, etcd.passwordSecret)" .name) -}}
{{- end -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n  %s" (join "\n  " $wrong)) -}}
{{- end -}}
{{- end }}
