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

{{- /* The name of an image. */}}
{{- define "millrace.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}

{{- /* What millrace.yaml holds: the settings that the chart needs win over `settings`. Fronts of several models have each
from its engines. */}}
{{- define "millrace.settings" -}}
{{- $own := dict "host" "0.0.0.0" "port" 8000 "shutdown_timeout_s" .Values.shutdownSeconds "lame_duck_s" .Values.lameDuckSeconds "download_dir" "/models" }}
{{- if and .Values.model (not (include "millrace.hasModels" .)) }}{{ $_ := set $own "model" .Values.model }}{{ end }}
{{- if .Values.apiKeys.secret }}{{ $_ := set $own "api_key_file" (printf "/etc/millrace/keys/%s" .Values.apiKeys.key) }}{{ end }}
{{- if .Values.adminKeys.secret }}{{ $_ := set $own "admin_key_file" (printf "/etc/millrace/admin-keys/%s" .Values.adminKeys.key) }}{{ end }}
{{- if .Values.allowNoKey }}{{ $_ := set $own "allow_no_key" true }}{{ end }}
{{- toYaml (merge $own .Values.settings) }}
{{- end }}

{{- /* The groups of engines of a fleet as JSON, the one of `fleet.engines` first: what a group leaves out is as there. */}}
{{- define "millrace.groups" -}}
{{- $v := .Values -}}
{{- $first := dict "where" "fleet" "component" "engine" "engines" $v.fleet.engines "labels" $v.fleet.labels "image" $v.image "model" $v.model "modelName" $v.fleet.modelName "engineSettings" $v.fleet.engineSettings "resources" $v.resources "gpus" $v.gpus "nodeSelector" $v.nodeSelector "tolerations" $v.tolerations "affinity" $v.affinity -}}
{{- $groups := list $first -}}
{{- range $name, $given := $v.fleet.groups -}}
{{- if $given -}}
{{- $group := deepCopy $first -}}
{{- range $key, $value := $given }}{{ $_ := set $group $key $value }}{{ end -}}
{{- $_ := set $group "where" (printf "fleet.groups.%s" $name) -}}
{{- $_ := set $group "component" (printf "engine-%s" $name) -}}
{{- $_ := set $group "labels" ($given.labels | default dict) -}}
{{- $settings := deepCopy $v.fleet.engineSettings -}}
{{- range $key, $value := $given.engineSettings }}{{ $_ := set $settings $key $value }}{{ end -}}
{{- $_ := set $group "engineSettings" $settings -}}
{{- $image := deepCopy $v.image -}}
{{- if hasKey ($given.image | default dict) "tag" }}{{ $_ := set $image "digest" "" }}{{ end -}}
{{- range $key, $value := $given.image }}{{ $_ := set $image $key $value }}{{ end -}}
{{- $_ := set $group "image" $image -}}
{{- $groups = append $groups $group -}}
{{- end -}}
{{- end -}}
{{- toJson $groups -}}
{{- end }}

{{- /* Not empty if the groups of engines serve several models. */}}
{{- define "millrace.hasModels" -}}
{{- if eq .Values.topology "fleet" -}}
{{- $names := list -}}
{{- range include "millrace.groups" . | fromJsonArray }}{{ $names = append $names .modelName }}{{ end -}}
{{- if gt (len (uniq $names)) 1 }}yes{{ end -}}
{{- end -}}
{{- end }}

{{- /* A selector of the pods, or the Services, of all engines of a fleet. */}}
{{- define "millrace.allEngines" -}}
{{- $components := list -}}
{{- range include "millrace.groups" . | fromJsonArray }}{{ $components = append $components .component }}{{ end -}}
matchLabels:
  {{- include "millrace.selector" . | nindent 2 }}
{{- if eq (len $components) 1 }}
  app.kubernetes.io/component: engine
{{- else }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " $components }}]}
{{- end }}
{{- end }}

{{- /* What the file of a group of engines holds. */}}
{{- define "millrace.engineSettings" -}}
{{- $v := .root.Values -}}
{{- $own := dict "shutdown_timeout_s" $v.shutdownSeconds "download_dir" "/models" }}
{{- if .group.model }}{{ $_ := set $own "model" .group.model }}{{ end }}
{{- if .group.modelName }}{{ $_ := set $own "served_model_name" (list .group.modelName) }}{{ end }}
{{- toYaml (merge $own .group.engineSettings) }}
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
route, or that of a `group` of engines: an engine serves fronts, and its pages are probed. */}}
{{- define "millrace.pod" -}}
{{- $v := .root.Values -}}
{{- $isEngine := not (empty .group) -}}
{{- $isRoute := eq (.role | default "") "route" -}}
{{- $group := .group | default $v -}}
{{- $hasKeys := and $v.apiKeys.secret (not $isEngine) -}}
{{- $hasAdminKeys := and $v.adminKeys.secret .serves (not $isEngine) -}}
{{- $gpus := ternary 0 (int $group.gpus) $isRoute -}}
{{- $resources := ternary $v.fleet.routeResources $group.resources $isRoute -}}
{{- /* A front reads the text files of models: a folder is in the claim, and a claim that is full has downloads too. */}}
{{- $reads := or $v.models.readOnly (hasPrefix "/models" $v.model) -}}
{{- range include "millrace.groups" .root | fromJsonArray }}{{ if hasPrefix "/models" .model }}{{ $reads = true }}{{ end }}{{ end -}}
{{- $hasClaim := and $v.models.claim (or (not $isRoute) $reads) -}}
{{- $readsOnly := or $v.models.readOnly (and $isRoute $hasClaim) -}}
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
    {{- if $isEngine }}
    checksum/settings: {{ include "millrace.engineSettings" . | sha256sum }}
    {{- else }}
    checksum/settings: {{ include "millrace.settings" .root | sha256sum }}
    {{- end }}
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
  terminationGracePeriodSeconds: {{ add $v.preStopSeconds $v.lameDuckSeconds $v.shutdownSeconds 15 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: millrace
      image: {{ include "millrace.image" $group.image }}
      imagePullPolicy: {{ $group.image.pullPolicy }}
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
      readinessProbe:  # not before a front has it: then the next one may end
        {{- include "millrace.probe" (dict "root" .root "path" "/health/ready?fronts=1" "port" "metrics") | nindent 8 }}
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
        - {name: models, mountPath: /models{{ if $readsOnly }}, readOnly: true{{ end }}}
        - {name: settings, mountPath: /etc/millrace/settings, readOnly: true}
        {{- if $hasKeys }}
        - {name: keys, mountPath: /etc/millrace/keys, readOnly: true}
        {{- end }}
        {{- if $hasAdminKeys }}
        - {name: admin-keys, mountPath: /etc/millrace/admin-keys, readOnly: true}
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
      {{- if $hasClaim }}
      persistentVolumeClaim: {claimName: {{ $v.models.claim }}{{ if $v.models.readOnly }}, readOnly: true{{ end }}}
      {{- else if $isRoute }}
      emptyDir: {}
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
    {{- if $hasAdminKeys }}
    - name: admin-keys
      secret:
        secretName: {{ $v.adminKeys.secret }}
        defaultMode: 0440
        items:
          - {key: {{ $v.adminKeys.key }}, path: {{ $v.adminKeys.key }}}
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
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end }}
