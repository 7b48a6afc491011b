{{- /* The template of the pods that train or wait: metadata and spec. */ -}}
{{- define "swift.podTemplate" -}}
{{- $v := .Values -}}
{{- $apart := include "swift.apart" (list $v.antiAffinity (include "swift.nodeLabels" .)) | fromYaml -}}
{{- $affinity := mergeOverwrite (dict) $apart $v.affinity -}}
metadata:
  labels:
    {{- include "swift.nodeLabels" . | nindent 4 }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $v.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
  serviceAccountName: {{ if eq $v.kind "ClusterTrainingRuntime" }}default{{ else }}{{ include "swift.serviceAccount" . }}{{ end }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if $v.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $v.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $v.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  tolerations:
    {{- range list "not-ready" "unreachable" }}
    - key: node.kubernetes.io/{{ . }}
      operator: Exists
      effect: NoExecute
      tolerationSeconds: {{ $v.nodeGoneSeconds }}
    {{- end }}
    {{- with $v.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  containers:
    - name: node
      image: {{ $v.image | default "set-by-the-trainjob" | quote }}
      imagePullPolicy: {{ $v.imagePullPolicy }}
      {{- if include "swift.isRuntime" . }}
      # The nodes of a TrainJob are all its pods, spares too. The shell makes way for swift-run.
      command:
        - sh
        - -c
        - exec swift-run --nnodes "$((PET_NNODES - PET_SPARES))" "$@"
        - swift-run
        {{- /* Not in args: those of a TrainJob take their place. */ -}}
        {{- with $v.options }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $v.script }}
      args:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- else }}
      command: [swift-run]
      args:
        {{- concat $v.options $v.script | toYaml | nindent 8 }}
      {{- end }}
      env:
        - name: SWIFT_POD
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: SWIFT_NAMESPACE
          valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
        - name: SWIFT_POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if include "swift.isRuntime" . }}
        - name: SWIFT_JOB
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}}
        - name: PET_RDZV_ID
          value: $(SWIFT_NAMESPACE)-$(SWIFT_JOB)
        {{- else }}
        - name: PET_RDZV_ID
          value: $(SWIFT_NAMESPACE)-{{ include "swift.name" . }}
        - name: PET_NNODES
          value: {{ if $v.minNodes }}"{{ $v.minNodes }}:{{ $v.nodes }}"{{ else }}{{ $v.nodes | quote }}{{ end }}
        - name: PET_NPROC_PER_NODE
          value: {{ $v.nprocPerNode | quote }}
        {{- if $v.job.indexed }}
        - name: PET_NODE_RANK
          valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        {{- end }}
        {{- end }}
        - name: PET_SPARES
          value: {{ $v.spares | quote }}
        # A pod that replaces another has another name, and is another node.
        - name: PET_NODE_ID
          value: $(SWIFT_POD)
        - name: PET_LOCAL_ADDR
          value: $(SWIFT_POD_IP)
        - name: PET_METRICS_ADDR
          value: $(SWIFT_POD_IP)
        - name: PET_METRICS_PORT
          value: {{ $v.metrics.port | quote }}
        - name: PET_PREEMPT_GRACE
          value: {{ $v.preemptGraceSeconds | quote }}
        # As after an eviction: the pod is made again, and is no success of the Job.
        - name: PET_DRAINED_EXIT_CODE
          value: "75"
        - name: SWIFT_JOB_SECRET_FILE
          value: /run/swift-agent/job/job-secret
        - name: SWIFT_ETCD_ENDPOINTS
          value: {{ include "swift.etcdEndpoints" . | quote }}
        {{- if include "swift.etcdClientSecret" . }}
        - name: SWIFT_ETCD_CACERT
          value: /run/swift-agent/etcd/ca.crt
        {{- if include "swift.hasEtcdCertificate" . }}
        - name: SWIFT_ETCD_CERT
          value: /run/swift-agent/etcd/tls.crt
        - name: SWIFT_ETCD_KEY
          value: /run/swift-agent/etcd/tls.key
        {{- end }}
        {{- end }}
        {{- if $v.etcd.user }}
        - name: SWIFT_ETCD_USER
          value: {{ $v.etcd.user | quote }}
        - name: SWIFT_ETCD_PASSWORD_FILE
          value: /run/swift-agent/login/password
        {{- end }}
        # Caches go where one can write; no name belongs to the user's number.
        - name: HOME
          value: /tmp
        - name: USER
          value: swift
        {{- with $v.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: metrics
          containerPort: {{ $v.metrics.port }}
          protocol: TCP
      startupProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: {{ max 1 (div $v.probes.startSeconds 2) }}
      livenessProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ max 1 (div $v.probes.aliveSeconds 10) }}
      readinessProbe:
        httpGet: {path: /readyz, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 1
      lifecycle:
        preStop:
          exec:
            # SIGTERM is the order to drain. A first process that does not catch it yet would never see it: it is held
            # back until swift-run has the handler (bit 14 of SigCgt), for 20 s at most.
            command:
              - sh
              - -c
              - >-
                n=0;
                until grep -qE '^SigCgt:.*[4-7c-f][0-9a-f]{3}$' /proc/1/status || [ "$n" -ge 100 ];
                do n=$((n + 1)); sleep 0.2; done
      {{- $resources := deepCopy $v.resources }}
      {{- with $v.rdma.resource }}
      {{- $resources = mergeOverwrite $resources (dict "limits" (dict . $v.rdma.count)) }}
      {{- end }}
      {{- with $resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: {{ $v.readOnlyRootFilesystem }}
        capabilities:
          drop: [ALL]
          {{- if $v.rdma.resource }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        - {name: job-secret, mountPath: /run/swift-agent/job, readOnly: true}
        {{- if include "swift.etcdClientSecret" . }}
        - {name: etcd-client, mountPath: /run/swift-agent/etcd, readOnly: true}
        {{- end }}
        {{- if $v.etcd.passwordSecret }}
        - {name: etcd-login, mountPath: /run/swift-agent/login, readOnly: true}
        {{- end }}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- with $v.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: job-secret
      secret: {secretName: {{ include "swift.jobSecret" . }}, defaultMode: 0440, items: [{key: job-secret, path: job-secret}]}
    {{- if include "swift.etcdClientSecret" . }}
    - name: etcd-client
      secret: {secretName: {{ include "swift.etcdClientSecret" . }}, defaultMode: 0440}
    {{- end }}
    {{- if $v.etcd.passwordSecret }}
    - name: etcd-login
      secret: {secretName: {{ $v.etcd.passwordSecret }}, defaultMode: 0440, items: [{key: password, path: password}]}
    {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $v.shm.sizeLimit }}}
    - name: tmp
      emptyDir: {{ if $v.tmp.sizeLimit }}{sizeLimit: {{ $v.tmp.sizeLimit }}}{{ else }}{}{{ end }}
    {{- with $v.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* Of a Job, by itself or in a JobSet. */ -}}
{{- define "swift.jobSpec" -}}
{{- $v := .Values -}}
{{- $pods := int (include "swift.numPods" .) -}}
parallelism: {{ $pods }}
completions: {{ $pods }}
{{- if $v.job.indexed }}
completionMode: Indexed
{{- end }}
backoffLimit: {{ mul $v.job.restarts $pods }}
{{- if $v.job.podFailurePolicy }}
# Exit codes of swift-run. The first rule that fits counts.
podFailurePolicy:
  rules:
    # The script has failed, the command line is wrong, a person has stopped the job: it would end so again.
    - action: FailJob
      onExitCodes: {containerName: node, operator: In, values: [1, 2, 3]}
    # The pod was told to go, and has gone.
    - action: Ignore
      onExitCodes: {containerName: node, operator: In, values: [75]}
    # An eviction, a lost machine.
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    # etcd does not answer, or no node takes a vacant place.
    - action: Count
      onExitCodes: {containerName: node, operator: In, values: [69]}
{{- end }}
{{- if and $v.job.successPolicy (not (include "swift.isRuntime" .)) }}
# A pod that is made again just when the job ends has nobody to train with. None ends with 0 before the run is complete.
successPolicy:
  rules:
    - succeededCount: {{ $v.minNodes | default $v.nodes }}
{{- end }}
{{- if $v.job.suspend }}
suspend: true
{{- end }}
{{- if $v.job.activeDeadlineSeconds }}
activeDeadlineSeconds: {{ int $v.job.activeDeadlineSeconds }}
{{- end }}
template:
  {{- include "swift.podTemplate" . | nindent 2 }}
{{- end }}
