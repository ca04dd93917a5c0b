{{- define "millrace.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "millrace.selector" -}}
app.kubernetes.io/name: millrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "millrace.labels" -}}
{{ include "millrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "millrace.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{- /* What millrace.yaml holds: the settings that the chart needs win over `settings`. */}}
{{- define "millrace.settings" -}}
{{- $own := dict "host" "0.0.0.0" "port" 8000 "shutdown_timeout_s" .Values.shutdownSeconds "download_dir" "/models" }}
{{- if .Values.model }}{{ $_ := set $own "model" .Values.model }}{{ end }}
{{- if .Values.apiKeys.secret }}{{ $_ := set $own "api_key_file" (printf "/etc/millrace/keys/%s" .Values.apiKeys.key) }}{{ end }}
{{- if .Values.allowNoKey }}{{ $_ := set $own "allow_no_key" true }}{{ end }}
{{- toYaml (merge $own .Values.settings) }}
{{- end }}

{{- /* What engine.yaml holds, of the engines of a fleet. */}}
{{- define "millrace.engineSettings" -}}
{{- $own := dict "shutdown_timeout_s" .Values.shutdownSeconds "download_dir" "/models" }}
{{- if .Values.model }}{{ $_ := set $own "model" .Values.model }}{{ end }}
{{- toYaml (merge $own .Values.fleet.engineSettings) }}
{{- end }}

{{- /* The arguments of `millrace engine` and `millrace route` for the key and the certificates of a fleet, as JSON. */}}
{{- define "millrace.fleetArgs" -}}
{{- $args := list "--fleet-key-file" (printf "/etc/millrace/fleet/%s" .Values.fleet.key) }}
{{- with .Values.fleet.tls }}
{{- if .secret }}
{{- range $flag, $file := dict "cert" .cert "key" .key "ca" .ca }}
{{- $args = concat $args (list (printf "--fleet-tls-%s" $flag) (printf "/etc/millrace/fleet-tls/%s" $file)) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $args }}
{{- end }}

{{- /* A probe of `path` at `port`, by default http: kubelet names a pod by its address, which `allowed_host` may exclude. */}}
{{- define "millrace.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port | default "http" }}
  scheme: {{ if and (not .port) .root.Values.settings.ssl_certfile }}HTTPS{{ else }}HTTP{{ end }}
  httpHeaders:
    - {name: Host, value: localhost}
{{- end }}

{{- /* The pod of `root` whose container runs `args`; only one that serves has a port and probes. In a fleet its `role` is
route or engine: an engine serves fronts, and its pages are probed. */}}
{{- define "millrace.pod" -}}
{{- $v := .root.Values -}}
{{- $isEngine := eq (.role | default "") "engine" -}}
{{- $isRoute := eq (.role | default "") "route" -}}
{{- $hasKeys := and $v.apiKeys.secret (not $isEngine) -}}
{{- $gpus := ternary 0 (int $v.gpus) $isRoute -}}
{{- $resources := ternary $v.fleet.routeResources $v.resources $isRoute -}}
metadata:
  labels:
    {{- include "millrace.labels" .root | nindent 4 }}
    {{- with .role }}
    app.kubernetes.io/component: {{ . }}
    {{- end }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/settings: {{ include (ternary "millrace.engineSettings" "millrace.settings" $isEngine) .root | sha256sum }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $v.serviceAccount }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if and $v.runtimeClass (not $isRoute) }}
  runtimeClassName: {{ $v.runtimeClass }}
  {{- end }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add $v.preStopSeconds $v.shutdownSeconds 10 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: millrace
      image: {{ include "millrace.image" .root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args: {{ toJson .args }}
      {{- with $v.huggingFaceToken.secret }}
      env:
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ . }}, key: {{ $v.huggingFaceToken.key }}}
      {{- end }}
      {{- if $isEngine }}
      ports:
        - {name: fleet, containerPort: 7000}
        - {name: metrics, containerPort: 9100}
      startupProbe:
        {{- include "millrace.probe" (dict "root" .root "path" "/health" "port" "metrics") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $v.startSeconds 4) 5 }}
      readinessProbe:
        {{- include "millrace.probe" (dict "root" .root "path" "/health" "port" "metrics") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        {{- include "millrace.probe" (dict "root" .root "path" "/health/live" "port" "metrics") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      {{- else if .serves }}
      ports:
        - {name: http, containerPort: 8000}
      startupProbe:
        {{- include "millrace.probe" (dict "root" .root "path" "/health/ready") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $v.startSeconds 4) 5 }}
      readinessProbe:
        {{- include "millrace.probe" (dict "root" .root "path" "/health/ready") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        {{- include "millrace.probe" (dict "root" .root "path" (ternary "/health/ready" "/health/live" $v.killStalled)) | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      lifecycle:
        preStop:
          sleep: {seconds: {{ $v.preStopSeconds }}}
      {{- end }}
      resources:
        requests:
          {{- toYaml $resources.requests | nindent 10 }}
        limits:
          {{- toYaml $resources.limits | nindent 10 }}
          {{- if $gpus }}
          {{ $v.gpuResource }}: {{ $gpus }}
          {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /models{{ if and $v.models.readOnly (not $isRoute) }}, readOnly: true{{ end }}}
        - {name: settings, mountPath: /etc/millrace/settings, readOnly: true}
        {{- if $hasKeys }}
        - {name: keys, mountPath: /etc/millrace/keys, readOnly: true}
        {{- end }}
        {{- if .role }}
        - {name: fleet, mountPath: /etc/millrace/fleet, readOnly: true}
        {{- if $v.fleet.tls.secret }}
        - {name: fleet-tls, mountPath: /etc/millrace/fleet-tls, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if or (not .serves) (gt $gpus 1) }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: models
      {{- if $isRoute }}
      emptyDir: {}
      {{- else if $v.models.claim }}
      persistentVolumeClaim: {claimName: {{ $v.models.claim }}{{ if $v.models.readOnly }}, readOnly: true{{ end }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $v.models.sizeLimit }}}
      {{- end }}
    - name: settings
      configMap: {name: {{ include "millrace.name" .root }}}
    {{- if .role }}
    - name: fleet
      secret:
        secretName: {{ $v.fleet.keySecret }}
        defaultMode: 0440
        items:
          - {key: {{ $v.fleet.key }}, path: {{ $v.fleet.key }}}
    {{- with $v.fleet.tls }}
    {{- if .secret }}
    - name: fleet-tls
      secret:
        secretName: {{ .secret }}
        defaultMode: 0440
        items:
          - {key: {{ .cert }}, path: {{ .cert }}}
          - {key: {{ .key }}, path: {{ .key }}}
          - {key: {{ .ca }}, path: {{ .ca }}}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- if $hasKeys }}
    - name: keys
      secret:
        secretName: {{ $v.apiKeys.secret }}
        defaultMode: 0440
        items:
          - {key: {{ $v.apiKeys.key }}, path: {{ $v.apiKeys.key }}}
    {{- end }}
    {{- if or (not .serves) (gt $gpus 1) }}
    - name: shared-memory
      emptyDir: {medium: Memory}
    {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "millrace.selector" .root | nindent 10 }}
          {{- with .role }}
          app.kubernetes.io/component: {{ . }}
          {{- end }}
  {{- if not $isRoute }}
  {{- with $v.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end }}
